"""One side of a transfer in a process of its own: JSON lines in, JSON lines out, nothing else.

usage: transfer_engine.py BACKEND SIDE SEED ITEMS_PER_TOKEN
"""

import json
import sys

from dcpjax.errors import TransferError
from dcpjax.transfer.mooncake import MooncakeBackend
from dcpjax.transfer.nixl import NixlBackend
from tests.transfer.engines import Engine

BACKENDS = {"nixl": NixlBackend, "mooncake": MooncakeBackend}


def main() -> None:
    backend, side, seed, items_per_token = sys.argv[1:]
    engine = Engine(BACKENDS[backend](), side, int(seed), int(items_per_token))
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = {"result": getattr(engine, name)(*arguments)}
        except TransferError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(answer), flush=True)
    engine.close()


if __name__ == "__main__":
    main()
