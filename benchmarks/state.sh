#!/usr/bin/env bash
# Trains the default job with its state in fewer bits, three seeds each, and prints the table of docs/update.md.
# Usage: benchmarks/state.sh [further flags of `longshore train`]. The script makes fifteen runs of about a minute each.
# LONGSHORE names a program to run in place of one built from this checkout.
set -euo pipefail
cd "$(dirname "$0")/.."
if [[ -z ${LONGSHORE-} ]]; then
  cargo build --release --locked --bin longshore
  LONGSHORE=target/release/longshore
fi
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
run() { # seed, state, master, flags...
  local seed=$1 state=$2 master=$3
  shift 3
  echo "running: moments $state, master $master, seed $seed" >&2
  "$LONGSHORE" train --json --seed "$seed" --state "$state" --master "$master" "$@" >"$out/$state.$master.$seed"
}
for seed in 1 2 3; do
  run "$seed" fp32 fp32 "$@"
  run "$seed" bf16 fp32 "$@"
  run "$seed" block8 fp32 "$@"
  run "$seed" fp32 bf16 "$@"
  run "$seed" block8 bf16 "$@"
done
python3 - "$out" <<'PYTHON'
import json, pathlib, statistics, sys

losses = {}
for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    state, master, seed = path.name.split(".")
    end = [json.loads(line) for line in path.read_text().splitlines()][-1]
    assert end["event"] == "end" and (end["state_format"], end["master_format"]) == (state, master)
    losses.setdefault((state, master), {})[seed] = end["validation_loss"]

seeds = sorted(losses["fp32", "fp32"])
base = statistics.mean(losses["fp32", "fp32"].values())
print("| moments | master | " + " | ".join(f"seed {seed}" for seed in seeds) + " | mean | against fp32 |")
print("|---|---|" + "---|" * (len(seeds) + 2))
for state, master in [("fp32", "fp32"), ("bf16", "fp32"), ("block8", "fp32"), ("fp32", "bf16"), ("block8", "bf16")]:
    of = losses[state, master]
    mean = statistics.mean(of.values())
    each = " | ".join(f"{of[seed]:.3f}" for seed in seeds)
    print(f"| {state} | {master} | {each} | {mean:.3f} | {100 * (mean / base - 1):+.1f} % |")
PYTHON
