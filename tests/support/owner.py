"""Run as a program: owns an embedded server until standard input ends or a signal comes.

    python -m tests.support.owner [as-nobody] [fork] [raise] [keep=DIRECTORY]

Prints the server's process id and folder, as JSON on one line. `fork` leaves a child that outlives it.
"""

from __future__ import annotations

import json
import os
import pwd
import signal
import sys

import psycopg

from pulse_outbox import embedded


def main(wishes: list[str]) -> None:
    if "as-nobody" in wishes:
        nobody = pwd.getpwnam("nobody")
        os.setgroups([])
        os.setgid(nobody.pw_gid)
        os.setuid(nobody.pw_uid)
    kept = next((wish.removeprefix("keep=") for wish in wishes if wish.startswith("keep=")), None)
    with embedded.start(directory=kept) as server:
        with psycopg.connect(server.dsn) as conn:
            conn.execute("select 1")
        said = {"pid": server.pid, "base": str(server.socket_directory.parent), "owner": os.getpid()}
        if "fork" in wishes:
            child = os.fork()
            if not child:
                server.stop()  # not its own: does nothing
                signal.pause()
            said["child"] = child
        print(json.dumps(said), flush=True)
        if "raise" in wishes:
            raise LookupError("on purpose")
        if sys.stdin.readline().strip() == "leave":
            os._exit(0)  # without any clean-up


if __name__ == "__main__":
    main(sys.argv[1:])
