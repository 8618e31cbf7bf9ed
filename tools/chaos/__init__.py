"""`penstock chaos`: workers are killed, frozen and cut off while clients record every entry they see.

plan.py         requests and faults, all from one seed
site.py         the server: an embedded one, or the one that was named
fleet.py        worker processes that come back when they are killed
process.py      one worker process, with the fake engine or the real one
fake_engine.py  an engine whose every token is known from the request alone
fake_words.py   what its tokens say: text, reasoning, tool calls
proxy.py        between a worker and Redis: sees each command and answer
saboteur.py     lets faults happen at the moments the plan names
client.py       sends requests, follows replies, writes down what it sees
history.py      what was seen and done
reading.py      what the chunks of one choice said, and what they have to say
checker.py      decides from the history alone whether the promises were kept
run.py          the run as a whole
report.py       the table
launch.py       the run with a server of its own
"""
