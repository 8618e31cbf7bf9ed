"""Tools that serving does not need: `penstock bench`, `chaos`, `map` and `plan`.

The command line imports each of them only when it runs its command. They may import every other folder, and no other
folder imports them.
"""
