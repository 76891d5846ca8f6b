"""Reads every sample of each shard it is given, each in a process of its own, and says what became of it.

For each, a line of JSON: seconds of its own time, MiB that memory grew by, and the samples' keys and pictures, or
the error.
"""

import json
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path

from clipkit.errors import DataError
from data.remote.store import ShardFile
from data.shards.samples import Shards

_SECONDS = 30
_MOST = 1000  # samples that are read


def resident() -> float:
    """Return the memory of this process in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def read(path: Path) -> dict[str, object]:
    before, began = resident(), time.process_time()
    answer: dict[str, object] = {}
    try:
        shards = Shards.of([ShardFile.at(path)])
        samples = [shards.read(number) for number in range(min(len(shards), _MOST))]
        answer["keys"] = [shards.locate(number)[1] for number in range(len(shards))]
        answer["images"] = [sample.image.decode("latin-1") for sample in samples]
    except DataError as error:
        answer["error"] = str(error)
    except Exception:  # what must not be: the test shows it
        answer["crash"] = traceback.format_exc()
    answer["seconds"] = time.process_time() - began
    # of this process alone: its parent's peak is not inherited
    answer["growth"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before
    return answer


def main() -> None:
    for name in sys.argv[1:]:
        process = os.fork()
        if not process:
            signal.alarm(_SECONDS)
            os.write(1, json.dumps({"path": name, **read(Path(name))}).encode() + b"\n")
            os._exit(0)
        _, status = os.waitpid(process, 0)
        if status:
            print(json.dumps({"path": name, "crash": f"status {status}"}), flush=True)


if __name__ == "__main__":
    main()
