"""The worker around an engine, which is a stand-in here."""
