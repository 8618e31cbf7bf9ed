"""The grammars of replies: texts, schemas and calls as a model may write them."""
