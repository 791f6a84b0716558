#!/usr/bin/env bash
# Runs exact, delayed and compensated training of the default job, three seeds each, and prints the table of docs/delay.md.
# Usage: docs/delay.sh [further flags of `longshore train`]. It takes about a minute a run, and makes twelve runs.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo build --release --locked --bin longshore
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
run() { # name, seed, flags...
  local name=$1 seed=$2
  shift 2
  echo "running: $name, seed $seed" >&2
  target/release/longshore train --json --seed "$seed" --eval-every 100 "$@" >"$out/$name.$seed"
}
for seed in 1 2 3; do
  run "exact" "$seed" "$@"
  run "delay 1" "$seed" --delay 1 "$@"
  run "delay 1, c = 0.5" "$seed" --delay 1 --compensation 0.5 "$@"
  run "delay 1, c = 1" "$seed" --delay 1 --compensation 1 "$@"
done
python3 - "$out" <<'PYTHON'
import json, pathlib, statistics, sys

runs = {}
for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    name, seed = path.name.rsplit(".", 1)
    events = [json.loads(line) for line in path.read_text().splitlines()]
    losses = {e["version"]: e["loss"] for e in events if e["event"] == "validation"}
    end = next(e for e in events if e["event"] == "end")
    losses[end["version"]] = end["validation_loss"]
    runs.setdefault(name, []).append((int(seed), losses, end["exposed_ms"]))

versions = sorted(next(iter(runs.values()))[0][1])
print("| run | seed | " + " | ".join(f"step {v}" for v in versions) + " | exposed ms |")
print("|---|---|" + "---|" * (len(versions) + 1))
for name in ["exact", "delay 1", "delay 1, c = 0.5", "delay 1, c = 1"]:
    for seed, losses, exposed in runs[name]:
        print(f"| {name} | {seed} | " + " | ".join(f"{losses[v]:.3f}" for v in versions) + f" | {exposed:.1f} |")
    means = [statistics.mean(losses[v] for _, losses, _ in runs[name]) for v in versions]
    exposed = statistics.mean(exposed for _, _, exposed in runs[name])
    print(f"| **{name}** | mean | " + " | ".join(f"**{m:.3f}**" for m in means) + f" | {exposed:.1f} |")
PYTHON
