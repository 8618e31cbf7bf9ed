"""What a chip can do and what a compiled step asks of it: chips, their links, and programs as XLA compiled them."""
