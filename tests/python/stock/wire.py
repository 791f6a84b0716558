"""The calls of a server over stock gRPC, and their errors.

The modules are generated from the .proto files when the client starts, into a temporary folder.
"""

import importlib
import pathlib
import sys
import time
from types import SimpleNamespace

import grpc
from grpc_tools import protoc

# google.rpc.Status and ErrorInfo: gRPC's packages bring no copy of these two error messages.
RPC_PROTO = """
syntax = "proto3";
package google.rpc;
import "google/protobuf/any.proto";
message Status { int32 code = 1; string message = 2; repeated google.protobuf.Any details = 3; }
message ErrorInfo { string reason = 1; string domain = 2; map<string, string> metadata = 3; }
"""

# Seconds for a call, with its repetitions after a broken connection. The server waits 60 s for a request without a deadline. Its own fault
# comes first, and names the missing rank.
DEADLINE = 70

# Statuses from gRPC itself and not from a broken connection: another call would not help.
FINAL = {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.DEADLINE_EXCEEDED}


class Refused(Exception):
    """A server's refusal of a call, with its reason. Nothing has changed."""

    def __init__(self, code, info):
        super().__init__(
            f"{info.reason}: {info.metadata['field']} is {info.metadata['value']}, "
            f"but must be {info.metadata['limit']}: {info.metadata['remedy']}"
        )
        self.code, self.reason, self.fault = code, info.reason, dict(info.metadata)

    @property
    def field(self):
        return self.fault["field"]


class Protocol:
    """All messages, enum values and methods of the .proto files, by name."""

    def __init__(self, protos: pathlib.Path, out: pathlib.Path):
        modules = generate(protos, out)
        self.rpc = modules.pop("google_rpc")
        names, self.methods = {}, {}
        for module in modules.values():
            names |= {name: getattr(module, name) for name in dir(module) if not name.startswith("_")}
            package = module.DESCRIPTOR.package
            for service in module.DESCRIPTOR.services_by_name.values():
                self.methods |= {method.name: (f"/{package}.{service.name}/", method) for method in service.methods}
        self.messages = SimpleNamespace(**names)

    def refusal(self, error: grpc.RpcError):
        """Returns the server's own reason, or None for a status made on the way."""
        details = dict(error.trailing_metadata() or {}).get("grpc-status-details-bin")
        if details is None:
            return None
        status, info = self.rpc.Status.FromString(details), self.rpc.ErrorInfo()
        if not any(detail.Unpack(info) for detail in status.details) or info.domain != "longshore":
            return None
        assert status.message == error.details() and status.code == error.code().value[0], status
        assert set(info.metadata) == {"field", "value", "limit", "remedy"} and all(info.metadata.values()), info
        return Refused(error.code(), info)


def generate(protos, out):
    (out / "google_rpc.proto").write_text(RPC_PROTO)
    names = sorted(path.stem for path in (protos / "longshore/v1").glob("*.proto"))
    files = [f"longshore/v1/{name}.proto" for name in names] + ["google_rpc.proto"]
    well_known = pathlib.Path(protoc.__file__).parent / "_proto"
    flags = [f"-I{protos}", f"-I{out}", f"-I{well_known}", f"--python_out={out}"]
    assert protoc.main(["protoc", *flags, *files]) == 0, "the .proto files must compile"
    sys.path.insert(0, str(out))
    modules = {name: importlib.import_module(f"longshore.v1.{name}_pb2") for name in names}
    return modules | {"google_rpc": importlib.import_module("google_rpc_pb2")}


class Server:
    """A server's calls from one process: its index in the job's placement, and two connections.

    A server that holds back a Push stream reads no more from it, and sent data may then fill the connection's flow control window. Other
    calls therefore need another connection. Without the option, gRPC would make one connection of all channels to the same address.
    """

    def __init__(self, protocol: Protocol, number: int, address: str):
        self.protocol, self.number, self.address = protocol, number, address
        self.channel, self.pushes = (
            grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) for _ in range(2)
        )

    def call(self, method: str, **fields):
        """Makes a control call. All are idempotent, so a call whose answer was lost is repeated."""
        path, kind = self.protocol.methods[method]
        request = getattr(self.protocol.messages, kind.input_type.name)(**fields)
        ask, end = self._callable(method, self.channel.unary_unary), time.monotonic() + DEADLINE
        while True:
            try:
                return ask(request, timeout=end - time.monotonic())
            except grpc.RpcError as error:
                refusal = self.protocol.refusal(error)
                if refusal:
                    raise refusal from None
                if error.code() in FINAL or time.monotonic() + 1 > end:
                    raise
                time.sleep(0.1)

    def stream(self, method: str, **fields):
        """Yields the answers of a call with one request and many answers."""
        request = getattr(self.protocol.messages, self.protocol.methods[method][1].input_type.name)(**fields)
        return Answers(self.protocol, self._callable(method, self.channel.unary_stream)(request, timeout=DEADLINE))

    def push(self, requests):
        """Returns the result of each chunk."""
        call = self._callable("Push", self.pushes.stream_stream)(iter(requests), timeout=DEADLINE)
        return [result for answer in Answers(self.protocol, call) for result in answer.results]

    def upload(self, requests):
        try:
            return self._callable("Upload", self.channel.stream_unary)(iter(requests), timeout=DEADLINE)
        except grpc.RpcError as error:
            raise self.protocol.refusal(error) or error from None

    def _callable(self, method, kind):
        path, described = self.protocol.methods[method]
        messages = self.protocol.messages
        return kind(
            path + method,
            request_serializer=getattr(messages, described.input_type.name).SerializeToString,
            response_deserializer=getattr(messages, described.output_type.name).FromString,
        )


class Answers:
    """A stream of answers. Its error is the server's."""

    def __init__(self, protocol, call):
        self.protocol, self.call = protocol, call

    def __iter__(self):
        return self

    def __next__(self):
        try:
            return next(self.call)
        except grpc.RpcError as error:
            raise self.protocol.refusal(error) or error from None
