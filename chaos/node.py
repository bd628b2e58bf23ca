"""A node with faults: python -m chaos.node --faults-seed TEXT --faults-log FILE, and any flag of `serve`."""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from app.serve import serve
from app.service.build import bootstrap_hosts, control_client, mooncake_driver
from app.service.node import Node
from app.settings import NodeSettings, load_settings
from app.transfer.base import EngineDriver
from chaos.faults import FaultLog, FaultyClient, FaultyDriver


def faulty_node(settings: NodeSettings, url: str, *, seed: str, log: FaultLog) -> Node:
    """As the product builds it, with faults in front of the engine and of the control client."""
    real = mooncake_driver(settings)
    # one source for each: how often one is asked must not change what the other does
    writes, messages = random.Random(f"{seed}/writes"), random.Random(f"{seed}/messages")

    def driver() -> EngineDriver:
        return FaultyDriver(real(), writes, log)

    client = control_client(settings, bootstrap_hosts(settings))
    return Node(settings, url=url, driver=driver, client=FaultyClient(client, messages, log))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos.node", allow_abbrev=False)
    parser.add_argument("--faults-seed", required=True)
    parser.add_argument("--faults-log", required=True, type=Path)
    known, flags = parser.parse_known_args()
    log = FaultLog(known.faults_log)
    return serve(
        load_settings(flags=flags),
        lambda settings, url: faulty_node(settings, url, seed=known.faults_seed, log=log),
    )


if __name__ == "__main__":
    sys.exit(main())
