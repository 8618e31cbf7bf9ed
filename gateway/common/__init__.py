"""What the APIs share: common fields, options and the documents that they become."""
