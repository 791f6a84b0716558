"""One training step over the wire with stock gRPC: what a client in another language has to do, and all of it.

Compiles the .proto files into a temporary folder, opens a job, uploads weights, pushes a gradient, reads the gradient statistics,
commits, pulls the new weights, and compares every bit with NumPy's.
"""

import argparse
import importlib
import math
import pathlib
import sys
import tempfile
import zlib
from dataclasses import dataclass

import grpc
import numpy as np
from grpc_tools import protoc

SERVICES = ["common", "training", "tensors", "admin"]

# google.rpc.Status and ErrorInfo, the two messages that errors are made of. gRPC's packages bring no copy of them.
RPC_PROTO = """
syntax = "proto3";
package google.rpc;
import "google/protobuf/any.proto";
message Status { int32 code = 1; string message = 2; repeated google.protobuf.Any details = 3; }
message ErrorInfo { string reason = 1; string domain = 2; map<string, string> metadata = 3; }
"""

BLOCK = 65536
CHUNK_BYTES = 1 << 20
SHARD_ELEMENTS = 8 * BLOCK
LOSS_SCALE = 128.0
CLIP = 1.0
HYPERS = [
    dict(lr=3e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1),
    dict(lr=1e-3, beta1=0.8, beta2=0.999, eps=1e-6, weight_decay=0.0),
]
SHAPES = {"w": [601, 1003], "b": [33]}


def compile_protos(protos: pathlib.Path, out: pathlib.Path):
    """Generates and imports the modules."""
    (out / "google_rpc.proto").write_text(RPC_PROTO)
    # All files are compiled, since services import messages from the others.
    files = [f"longshore/v1/{path.name}" for path in sorted((protos / "longshore/v1").glob("*.proto"))]
    files.append("google_rpc.proto")
    well_known = pathlib.Path(protoc.__file__).parent / "_proto"
    flags = [f"-I{protos}", f"-I{out}", f"-I{well_known}", f"--python_out={out}", f"--grpc_python_out={out}"]
    assert protoc.main(["protoc", *flags, *files]) == 0, "the .proto files must compile"
    sys.path.insert(0, str(out))
    modules = {name: importlib.import_module(f"longshore.v1.{name}_pb2") for name in SERVICES}
    stubs = {name: importlib.import_module(f"longshore.v1.{name}_pb2_grpc") for name in SERVICES[1:]}
    return modules, stubs, importlib.import_module("google_rpc_pb2")


def to_bf16(values: np.ndarray) -> np.ndarray:
    """bf16: the upper halves, rounded to nearest even. The values are finite."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(halves: np.ndarray) -> np.ndarray:
    return (halves.astype(np.uint32) << 16).view(np.float32)


def encode(values: np.ndarray, dtype: str) -> bytes:
    return (to_bf16(values).astype("<u2") if dtype == "bf16" else values.astype("<f4")).tobytes()


def decode(data: bytes, dtype: str) -> np.ndarray:
    return from_bf16(np.frombuffer(data, "<u2")) if dtype == "bf16" else np.frombuffer(data, "<f4")


@dataclass
class Layout:
    """The flat space: each parameter starts at the next multiple of 64 elements, and the whole is padded to blocks."""

    ranges: list
    elements: int

    @staticmethod
    def of(shapes) -> "Layout":
        ranges, start = [], 0
        for shape in shapes:
            end = start + math.prod(shape)
            ranges.append(slice(start, end))
            start = -(-end // 64) * 64
        return Layout(ranges, -(-start // BLOCK) * BLOCK)

    def shards(self):
        for index, start in enumerate(range(0, self.elements, SHARD_ELEMENTS)):
            yield index, slice(start, min(start + SHARD_ELEMENTS, self.elements))


def chunks(data: bytes):
    """(chunk, payload, CRC-32) for each MiB of a shard's data."""
    for chunk, start in enumerate(range(0, len(data), CHUNK_BYTES)):
        payload = data[start : start + CHUNK_BYTES]
        yield chunk, payload, zlib.crc32(payload)


def adamw(hyper, old: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """The first step in float32: decay, moments, bias-corrected step. Scalars are formed in float64 and rounded once."""
    f32 = np.float32
    lr, beta1, beta2 = hyper["lr"], hyper["beta1"], hyper["beta2"]
    first, second = np.zeros_like(old), np.zeros_like(old)
    decayed = old * f32(1.0 - lr * hyper["weight_decay"])
    first = first + (gradient - first) * f32(1.0 - beta1)
    second = second * f32(beta2) + (f32(1.0 - beta2) * gradient) * gradient
    root = np.sqrt(second) * f32(1.0 / math.sqrt(1.0 - beta2)) + f32(hyper["eps"])
    return decayed - f32(lr / (1.0 - beta1)) * (first / root)


class Client:
    """The stubs of one server, and a job on it."""

    def __init__(self, address, generated, job, dtype):
        self.modules, stubs, self.rpc = generated
        channel = grpc.insecure_channel(address)
        self.training = stubs["training"].TrainingStub(channel)
        self.tensors = stubs["tensors"].TensorsStub(channel)
        self.admin = stubs["admin"].AdminStub(channel)
        self.address, self.job, self.incarnation = address, job, 41
        self.dtype_name = dtype
        self.dtype = self.modules["common"].Dtype.Value(f"DTYPE_{dtype.upper()}")
        self.layout = Layout.of(SHAPES.values())

    def spec(self):
        common = self.modules["common"]
        params = [
            common.Param(name=name, shape=shape, group=group) for group, (name, shape) in enumerate(SHAPES.items())
        ]
        return common.JobSpec(
            name=self.job,
            params=params,
            groups=["decay", "no decay"],
            rule=common.RULE_ADAMW,
            gradient_dtype=self.dtype,
            image_dtype=self.dtype,
            world_size=1,
            micro_steps=1,
            max_delay=0,
            shard_elements=SHARD_ELEMENTS,
            tier=common.TIER_MEMORY,
        )

    def open(self):
        owners = [0 for _ in self.layout.shards()]
        placement = self.modules["common"].Placement(epoch=1, servers=[self.address], owners=owners)
        request = self.modules["training"].OpenJobRequest(spec=self.spec(), placement=placement, server=0)
        return self.training.OpenJob(request, timeout=60)

    def join(self):
        request = self.modules["training"].JoinRequest(job=self.job, rank=0, incarnation=self.incarnation)
        return self.training.Join(request, timeout=60)

    def describe(self):
        return self.admin.Describe(self.modules["admin"].DescribeRequest(job=self.job), timeout=60)

    def upload(self, weights):
        def requests():
            for shard, part in self.layout.shards():
                for chunk, payload, crc32 in chunks(encode(weights[part], "f32")):
                    yield self.modules["tensors"].UploadRequest(
                        job=self.job,
                        incarnation=self.incarnation,
                        shard=shard,
                        chunk=chunk,
                        crc32=crc32,
                        payload=payload,
                    )

        return self.tensors.Upload(requests(), timeout=60).chunks

    def push_requests(self, gradient):
        for shard, part in self.layout.shards():
            for chunk, payload, crc32 in chunks(encode(gradient[part], self.dtype_name)):
                yield self.modules["tensors"].PushRequest(
                    job=self.job,
                    incarnation=self.incarnation,
                    rank=0,
                    step=1,
                    micro_step=0,
                    shard=shard,
                    chunk=chunk,
                    loss_scale=LOSS_SCALE,
                    dtype=self.dtype,
                    crc32=crc32,
                    payload=payload,
                )

    def push(self, requests):
        responses = self.tensors.Push(iter(requests), timeout=60)
        return [result for response in responses for result in response.results]

    def stats(self):
        request = self.modules["training"].StatsRequest(job=self.job, step=1, deadline_ms=30000)
        answers = {stats.shard: list(stats.blocks) for stats in self.training.Stats(request, timeout=60)}
        return [block for shard in sorted(answers) for block in answers[shard]]

    def commit(self, norm, coefficient, hypers=HYPERS):
        commit = self.modules["common"].Commit(
            step=1,
            gradient_scale=LOSS_SCALE,
            clip_coefficient=coefficient,
            groups=[self.modules["common"].Hyper(**hyper) for hyper in hypers],
            norm=norm,
            loss_scale=LOSS_SCALE,
        )
        request = self.modules["training"].CommitRequest(job=self.job, incarnation=self.incarnation, commit=commit)
        return self.training.Commit(request, timeout=60)

    def pull(self, version):
        tensors = self.modules["tensors"]
        slices = [
            tensors.Slice(shard=shard, offset=0, elements=part.stop - part.start)
            for shard, part in self.layout.shards()
        ]
        request = tensors.PullRequest(job=self.job, version=version, dtype=self.dtype, slices=slices)
        image = np.full(self.layout.elements, np.nan, np.float32)
        for answer in self.tensors.Pull(request, timeout=60):
            assert zlib.crc32(answer.payload) == answer.crc32
            values = decode(answer.payload, self.dtype_name)
            start = answer.shard * SHARD_ELEMENTS + answer.offset
            image[start : start + len(values)] = values
        return image

    def refused(self, call):
        """The gRPC code and the google.rpc.ErrorInfo of a call that must fail."""
        try:
            call()
        except grpc.RpcError as error:
            details = dict(error.trailing_metadata())["grpc-status-details-bin"]
            status = self.rpc.Status.FromString(details)
            info = self.rpc.ErrorInfo()
            assert status.message == error.details() and status.code == error.code().value[0]
            assert any(detail.Unpack(info) for detail in status.details), status
            assert info.domain == "longshore" and set(info.metadata) == {"field", "value", "limit", "remedy"}, info
            assert all(info.metadata.values()), info
            return error.code(), info.reason, info.metadata
        raise AssertionError("the call must be refused")


def check_errors(client, gradient):
    """Refusals carry details, and change nothing."""
    broken = next(iter(client.push_requests(gradient)))
    broken.crc32 ^= 1
    [result] = client.push([broken])
    assert result.HasField("refusal") and result.refusal.kind == "CORRUPT", result
    assert result.refusal.field == "push.crc32" and result.refusal.remedy, result
    code, reason, fault = client.refused(lambda: client.commit(1.0, 1.0))
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "PRECONDITION"), (code, reason)
    assert fault["field"] == "commit.step" and "shard 0 from rank 0" in fault["limit"], fault
    nan = [dict(HYPERS[0], lr=math.nan), HYPERS[1]]
    code, reason, fault = client.refused(lambda: client.commit(1.0, 1.0, nan))
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID"), (code, reason)
    assert (fault["field"], fault["value"]) == ("commit.groups[0].lr", "NaN"), fault


def check_stats(blocks, gradient):
    squares = (gradient.astype(np.float64) ** 2).reshape(-1, BLOCK).sum(axis=1)
    assert len(blocks) == len(squares)
    for block, expected in zip(blocks, squares):
        assert not block.HasField("first_nonfinite")
        # Squares are added in f32, sixteen at a time.
        assert math.isclose(block.sum_squares, expected, rel_tol=1e-6), (block, expected)


def expected_weights(client, weights, gradient, coefficient):
    multiplier = np.float32(coefficient / LOSS_SCALE)
    after = weights.copy()
    for part, hyper in zip(client.layout.ranges, HYPERS):
        after[part] = adamw(hyper, weights[part], gradient[part] * multiplier)
    return decode(encode(after, client.dtype_name), client.dtype_name)


def assert_same_bits(found, expected, what):
    differs = np.flatnonzero(found.view(np.uint32) != expected.view(np.uint32))
    if differs.size:
        at = differs[0]
        raise AssertionError(f"{what}: {differs.size} differ, the first at {at}: {found[at]}, must be {expected[at]}")


def train_a_step(client):
    random = np.random.default_rng(12)
    weights, gradient = np.zeros((2, client.layout.elements), np.float32)
    for part in client.layout.ranges:
        weights[part] = random.standard_normal(part.stop - part.start)
        gradient[part] = random.standard_normal(part.stop - part.start) * LOSS_SCALE
    # What arrives is what was rounded for the wire.
    gradient = decode(encode(gradient, client.dtype_name), client.dtype_name).copy()
    shards = [shard for shard, _ in client.layout.shards()]
    training = client.modules["training"]

    code, reason, fault = client.refused(client.join)
    assert (code, reason, fault["field"]) == (grpc.StatusCode.NOT_FOUND, "NOT_FOUND", "job"), (code, reason, fault)
    opened = client.open()
    assert opened.created and opened.progress.phase == training.PHASE_LOADING
    assert list(opened.progress.missing_shards) == shards
    assert not client.open().created, "the same spec opens the same job"
    client.join()
    assert client.upload(weights) == 3, "two chunks of the first shard, one of the second"
    progress = client.describe().progress
    assert (progress.phase, progress.version) == (training.PHASE_TRAINING, 0), progress
    initial = decode(encode(weights, client.dtype_name), client.dtype_name)
    assert_same_bits(client.pull(0), initial, "the initial weights")

    check_errors(client, gradient)
    requests = list(client.push_requests(gradient))
    results = client.push(requests)
    assert len(results) == len(requests) and not any(result.HasField("refusal") for result in results), results
    assert all(result.duplicate for result in client.push(requests)), "pushed again, acknowledged again"
    blocks = client.stats()
    check_stats(blocks, gradient)
    norm = math.sqrt(sum(block.sum_squares for block in blocks)) / LOSS_SCALE
    coefficient = min(1.0, CLIP / (norm + 1e-6))
    assert coefficient < 1.0
    assert not client.commit(norm, coefficient).duplicate and client.commit(norm, coefficient).duplicate

    expected = expected_weights(client, weights, gradient, coefficient)
    assert_same_bits(client.pull(1), expected, "the weights after the step")
    assert np.any(expected != initial)
    described = client.describe()
    assert (described.progress.version, described.progress.applied) == (1, 1), described.progress
    assert described.progress.last_commit.norm == norm
    opened = client.spec()  # what it left out is said in the answer
    opened.state_format = client.modules["common"].STATE_FORMAT_F32
    opened.master_format = client.modules["common"].MASTER_FORMAT_F32
    assert described.spec == opened, described.spec
    assert described.ranks[0].incarnation == client.incarnation and described.ranks[0].last_step == 1
    client.training.Leave(training.LeaveRequest(job=client.job, rank=0, incarnation=client.incarnation), timeout=60)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--protos", type=pathlib.Path, required=True, help="folder of longshore/v1/*.proto")
    parser.add_argument("--server", required=True, help="host:port")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        generated = compile_protos(arguments.protos, pathlib.Path(folder))
        for dtype in ["bf16", "f32"]:
            train_a_step(Client(arguments.server, generated, f"stock-{dtype}", dtype))
            print(f"{dtype}: every bit as NumPy computes it")
    print("ok")


if __name__ == "__main__":
    main()
