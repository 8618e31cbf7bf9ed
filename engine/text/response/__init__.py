"""How chat models spell reasoning and tool calls, and how their replies are parsed."""
