"""Checks an export against the checkpoint of the same version, with the stock safetensors package.

usage: check_export.py CHECKPOINT_FOLDER EXPORT_FOLDER bf16|f16|f32

Every tensor must be the cast of the fp32 master weights, bit for bit. Prints the number of tensors and "ok".
"""

import json
import pathlib
import sys

import numpy as np
import safetensors

ALIGN = 64  # elements: each parameter starts at a multiple in the flat space


def tensors_of(path):
    return dict(safetensors.deserialize(path.read_bytes()))


def master_weights(checkpoint):
    shards = {}
    for part in sorted(checkpoint.glob("*.safetensors")):
        for name, tensor in tensors_of(part).items():
            if name.startswith("shard.") and name.endswith(".master"):
                shards[int(name.split(".")[1])] = np.frombuffer(bytes(tensor["data"]), dtype="<f4")
    assert sorted(shards) == list(range(len(shards))), f"shards {sorted(shards)}"
    return np.concatenate([shards[number] for number in sorted(shards)])


def cast(values, dtype):
    if dtype == "f32":
        return values.tobytes()
    if dtype == "f16":
        return values.astype("<f2").tobytes()
    bits = values.view("<u4").astype(np.uint64)  # round to nearest even, and drop the lower half
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def files_of(export):
    index = export / "model.safetensors.index.json"
    if not index.exists():
        return ["model.safetensors"], None
    index = json.loads(index.read_text())
    return sorted(set(index["weight_map"].values())), index


def main(checkpoint, export, dtype):
    master = master_weights(checkpoint)
    names, index = files_of(export)
    found = sorted(path.name for path in export.iterdir() if path.suffix == ".safetensors")
    assert found == names, f"{found}, not {names}"
    at, total, count = 0, 0, 0
    for name in names:
        path = export / name
        with safetensors.safe_open(path, framework="np") as file:
            assert file.metadata()["format"] == "pt", file.metadata()
        header = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
        tensors = tensors_of(path)
        header.pop("__metadata__")
        for tensor in sorted(header, key=lambda tensor: header[tensor]["data_offsets"]):
            if index is not None:
                assert index["weight_map"][tensor] == name, tensor
            elements = int(np.prod(tensors[tensor]["shape"]))
            expected = cast(master[at : at + elements], dtype)
            assert bytes(tensors[tensor]["data"]) == expected, f"{tensor} is not the cast of its master weights"
            assert tensors[tensor]["dtype"] == {"f32": "F32", "f16": "F16", "bf16": "BF16"}[dtype]
            at += -(-elements // ALIGN) * ALIGN
            total += len(expected)
            count += 1
    assert index is None or index["metadata"]["total_size"] == total
    print(count, "tensors", len(names), "files ok")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3])
