"""GGUF files: metadata, tokenizer and weights in one, as llama.cpp writes and reads them."""
