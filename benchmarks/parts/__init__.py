"""What the measurements share: stand-ins for engines and networks, the sides that are compared, and tables.

Nothing here is run by itself. A measurement with a command line belongs one folder up.
"""
