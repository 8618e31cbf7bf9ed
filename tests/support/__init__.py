"""What tests of several rooms share: patience, and things to look at."""
