"""tools/chaos: workers killed, frozen and cut off, and every token checked."""
