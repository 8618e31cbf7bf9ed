"""From tokens to the reply stream: chunks, the outbox, the journal that a takeover reads, and how a reply ends."""
