"""The parts of `penstock chat`: the conversation and its commands, who answers, and what a person types."""
