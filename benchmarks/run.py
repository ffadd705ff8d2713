"""Run the benchmarks and keep what each prints last, a JSON line, in a file that says how it came about.

python benchmarks/run.py            all of them
python benchmarks/run.py harm link  only these
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
COMMANDS = {
    **{
        f"compress-{ratio}": f"bench compress --numel 25557032 --ratio {ratio} --threads 1 --json"
        for ratio in (0.1, 0.01, 0.001)
    },
    "quantize": "bench quantize --numel 4194304 --json",
    "link": "bench link --json",
    "harm": "bench harm --json",
    # Needs root, or user namespaces; see docs/lab.md.
    "links-on-a-wire": "lab run --hosts 4 --latency 5ms --rate 100mbit -- python benchmarks/links_on_a_wire.py",
    **{
        f"computing-{hosts}": f"lab run --hosts {hosts} --latency 1ms --rate 200mbit -- python benchmarks/computing.py"
        for hosts in (4, 8)
    },
    "regret": "bench regret --json",
}


def main() -> None:
    RESULTS.mkdir(exist_ok=True)
    wanted = sys.argv[1:] or list(COMMANDS)
    if unknown := set(wanted) - COMMANDS.keys():
        sys.exit(f"there is no benchmark {', '.join(sorted(unknown))}. Known are: {', '.join(COMMANDS)}.")
    for name in wanted:
        command = COMMANDS[name]
        print(f"thinwire {command}", flush=True)
        words = [sys.executable if word == "python" else word for word in command.split()]
        output = subprocess.run(
            [sys.executable, "-m", "thinwire", *words], check=True, text=True, stdout=subprocess.PIPE
        ).stdout
        print(output, flush=True)
        figures = json.loads(output.strip().splitlines()[-1].removeprefix("[0] "))
        result = {"command": f"thinwire {command}", "date": f"{datetime.date.today()}", **figures}
        (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
