"""Stands in for redis-cli, as far as the scripts of deploy/redis use it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import ConnectionError as NotThere


def main(arguments: list[str]) -> int:
    options: dict[str, str] = {}
    while arguments and arguments[0].startswith("-"):
        options[arguments[0]] = arguments[1]
        del arguments[:2]
    place: dict[str, Any] = (
        {"unix_socket_path": options["-s"]} if "-s" in options else {"port": int(os.environ["REDIS_PORT"])}
    )
    client = Redis(**place, username=options.get("--user"), password=os.environ.get("REDISCLI_AUTH"), protocol=2)
    if "--rdb" in options:  # redis-cli reads as a replica does; a file has the same bytes
        before = client.lastsave()
        time.sleep(1.1)  # the time of a save is in seconds
        client.bgsave()
        while client.lastsave() == before:
            time.sleep(0.02)
        folder, name = (str(client.config_get(option)[option]) for option in ("dir", "dbfilename"))
        sys.stdout.buffer.write((Path(folder) / name).read_bytes())
        return 0
    if arguments[0] == "shutdown":
        client.shutdown(nosave=True)
        return 0
    try:
        answer = client.execute_command(*arguments)
    except NotThere:
        return 1
    text = answer if isinstance(answer, str) else answer.decode() if isinstance(answer, bytes) else str(answer)
    if isinstance(answer, dict):
        text = "\r\n".join(f"{name}:{value}" for name, value in answer.items())
    sys.stdout.write({"True": "PONG"}.get(text, text) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
