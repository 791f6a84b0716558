"""Each mistake gives an error that names the parameter and the remedy, and changes nothing."""

import copy
import dataclasses
import os
import pathlib
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from conftest import Server
from forked import Forked
from models import distance, pair, same_bits, train
from torch import nn

import longshore
from longshore import _longshore, errors, optim
from longshore.transfer import job, options


def made(model: nn.Module, **options: object) -> longshore.AdamW:
    optimizer = longshore.AdamW(model.named_parameters(), **options)
    model.loss(0).backward()
    return optimizer


def test_a_missing_gradient_names_parameter_and_remedy_and_changes_nothing() -> None:
    model, before = pair("mlp")
    optimizer = made(model, missing_gradients="error")
    model.layers[2].bias.grad = None
    with pytest.raises(errors.MissingGradientError, match=r"layers\.2\.bias\.grad is None.*missing_gradients='skip'.*'zeros'") as raised:
        optimizer.step()
    assert raised.value.field == "layers.2.bias.grad"
    assert "requires_grad_" in raised.value.remedy
    assert same_bits(model, before)
    model.layers[2].bias.grad = torch.zeros_like(model.layers[2].bias)
    optimizer.step()
    assert optimizer.version == 1


def shrink(tensor: torch.Tensor) -> None:
    assert tensor.grad is not None
    tensor.grad.data = torch.zeros(3)


def narrow(tensor: torch.Tensor) -> None:
    assert tensor.grad is not None
    gradient, tensor.grad = tensor.grad, None
    tensor.grad_dtype = None  # type: ignore[attr-defined]
    tensor.grad = gradient.bfloat16()


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (shrink, r"grad is \[3\], but must be \[32, 32\]"),
        (narrow, r"grad is torch\.bfloat16, but must be torch\.float32.*convert it"),
    ],
)
def test_a_gradient_that_is_not_the_parameters(spoil: Callable[[torch.Tensor], None], message: str, streaming: bool) -> None:
    """Hooks of other libraries may set such a gradient."""
    model, _ = pair("mlp")
    weight, spoils = model.layers[3].weight, [spoil]
    weight.register_post_accumulate_grad_hook(lambda tensor: spoils.pop()(tensor) if spoils else None)
    optimizer = longshore.AdamW(model.named_parameters(), streaming=streaming)
    with pytest.raises(errors.GradientError, match=r"layers\.3\.weight\." + message):
        model.loss(0).backward()
        optimizer.step()
    weight.grad = None
    train(model, optimizer, range(1))
    assert optimizer.version == 1


def test_two_optimizers_over_one_parameter() -> None:
    model, _ = pair("mlp")
    first = made(model)
    first.step()
    second = longshore.SGD(list(model.named_parameters())[:2], lr=0.1)
    with pytest.raises(errors.UsageError, match=r"layers\.0\.weight is updated by two optimizers.*close\(\)"):
        second.step()
    first.close()
    second.step()
    assert second.version == 1


def test_tied_weights_in_two_groups() -> None:
    model, _ = pair("llama")
    groups = [[("embed.weight", model.embed.weight)], [("head.weight", model.head.weight)]]
    with pytest.raises(ValueError, match="more than one parameter group: head.weight.*embed.weight"):
        longshore.AdamW([{"params": params} for params in groups])
    alias = nn.Parameter(model.embed.weight.data)
    optimizer = longshore.AdamW([("embed.weight", model.embed.weight), ("head.weight", alias)])
    alias.grad = model.embed.weight.grad = torch.zeros_like(alias)
    with pytest.raises(errors.InvalidError, match=r"head\.weight is tied.*embed\.weight.*one Parameter"):
        optimizer.step()


def test_sparse_gradients() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = longshore.AdamW(embedding.named_parameters(prefix="words"))
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(errors.GradientError, match=r"words\.weight\.grad is torch\.sparse_coo.*SparseAdam"):
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64])
def test_parameters_of_types_that_servers_do_not_keep(dtype: torch.dtype) -> None:
    with pytest.raises(errors.InvalidError, match=f"wave is {dtype}.*"):
        longshore.AdamW([("wave", nn.Parameter(torch.zeros(3, dtype=dtype)))])


def test_non_finite_gradients_are_skipped_or_refused() -> None:
    for nonfinite in ("skip", "raise"):
        model, before = pair("mlp")
        optimizer = made(model, nonfinite=nonfinite)
        model.layers[3].weight.grad[1, 0] = float("nan")
        if nonfinite == "skip":
            with pytest.warns(RuntimeWarning, match=r"step 1 was skipped.*layers\.3\.weight"):
                optimizer.step()
        else:
            with pytest.raises(errors.LongshoreError, match=r"layers\.3\.weight"):
                optimizer.step()
        assert same_bits(model, before)
        assert optimizer.last_report.skipped
        assert optimizer.state_dict()["state"][0]["step"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"amsgrad": True}, "amsgrad is True"),
        ({"maximize": True}, "negate the loss"),
        ({"lr": -1.0}, "must be at least 0: Invalid learning rate: -1.0"),
        ({"betas": (1.0, 0.9)}, "must be at least 0 and below 1: Invalid beta parameter at index 0: 1.0"),
        ({"gradient_dtype": "fp8"}, "one of auto, fp32, bf16, fp16"),
        ({"accumulate": 4}, "1 without streaming"),
        ({"accumulate": 0, "streaming": True}, "accumulate is 0, but must be at least 1"),
        ({"delay": 2}, "delay is 2, but must be 0 or 1"),
        ({"seed": -1}, "seed is -1, but must be at least 0"),
        ({"streaming": "no"}, "streaming is 'no', but must be True or False"),
        ({"loss_scale": 128.0}, "loss_scale is 128.0, but must be a longshore.LossScale"),
        ({"max_grad_norm": "1.0"}, "max_grad_norm is '1.0', but must be a float"),
        ({"servers": ""}, "servers is '', but must be addresses as host:port"),
        ({"max_grad_norm": 0.0}, "use None for no clipping"),
        ({"nonfinite": "apply"}, "always checked"),
        ({"written_weights": "keep"}, "written_weights is 'keep', but must be one of error, drop"),
        ({"frozen": "drop"}, "frozen"),
        ({"world_size": 2, "rank": 0}, "addresses that all 2 ranks share"),
        ({"world_size": 2, "rank": 2, "servers": "a:1", "job": "j"}, "rank is 2"),
        ({"world_size": 2, "rank": 0, "servers": "a:1"}, "the same job="),
    ],
)
def test_arguments_that_contradict_each_other_or_the_rules(arguments: dict[str, object], message: str) -> None:
    model, _ = pair("mlp")
    with pytest.raises(ValueError, match=message):
        longshore.AdamW(model.named_parameters(), **arguments)


@pytest.mark.parametrize(("name", "choices"), [("rule", optim.RULES), *((name, options._choices()[name]) for name in ("tier", "state", "master"))])
def test_choices_are_those_of_the_servers(name: str, choices: Iterable[str]) -> None:
    settings = job.settings(options.Options(servers="host:7070"), "choices", "adamw", [], [])
    with pytest.raises(errors.InvalidError) as refused:
        _longshore.Job(dataclasses.replace(settings, **{name: "another"}))
    assert {*refused.value.limit.removeprefix("one of ").replace(" or ", ", ").split(", ")} == {*choices}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("sever", "servers"),
        ("learning_rate", "lr"),
        ("gradient_accumulation_steps", "accumulate"),
        ("clip_grad_norm", "max_grad_norm"),
    ],
)
def test_an_unknown_option_is_named_with_the_nearest_one(name: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"'{name}', did you mean '{meant}'.*options of the job are accumulate, "):
        longshore.AdamW(pair("mlp")[0].named_parameters(), **{name: 1})


@pytest.mark.parametrize("option", ["streaming", "max_grad_norm", "job"])
def test_an_option_in_a_param_group_is_refused(option: str) -> None:
    with pytest.raises(errors.UsageError, match=rf"param_groups\['{option}'\] is 1, but must be absent.*give the optimizer {option}="):
        longshore.AdamW([{"params": pair("mlp")[0].parameters(), option: 1}])


@pytest.mark.parametrize("kind", optim.RULES.values())
def test_hyperparameters_are_checked_as_in_torch(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"Invalid learning rate: -0\.1"):
        kind(None, lr=-0.1)
    for wrong in ("1e-2", None, [0.1]):
        with pytest.raises(errors.InvalidError, match="learning rate is .*must be a number"):
            kind([nn.Parameter(torch.ones(2))], lr=wrong)
    with pytest.raises(errors.InvalidError, match=r"group0\.param0 is on the meta device.*to_empty\(\)"):
        kind([nn.Parameter(torch.ones(2, device="meta"))])


@pytest.mark.parametrize("arguments", [{"momentum": 1.5}, {"momentum": 0.9, "dampening": -1.0}, {"momentum": 0.9, "dampening": 2.0}])
def test_momentum_has_torchs_limits(arguments: dict[str, float]) -> None:
    ours, theirs = pair("mlp")
    train(ours, longshore.SGD(ours.parameters(), lr=1e-2, **arguments), range(4))
    train(theirs, torch.optim.SGD(theirs.parameters(), lr=1e-2, **arguments), range(4))
    assert distance(ours, theirs) < 1e-5


def test_a_first_weight_that_is_not_finite_is_named() -> None:
    model, _ = pair("mlp")
    with torch.no_grad():
        model.layers[2].bias[3] = float("nan")
    with pytest.raises(errors.RefusedError, match=r"NaN in layers\.2\.bias, element 3"):
        made(model).step()


def test_names_of_two_models_get_a_prefix() -> None:
    first, second = pair("mlp")
    with pytest.raises(errors.InvalidError, match=r"layers\.0\.weight is the name of two parameters.*each with a prefix"):
        longshore.AdamW([*first.named_parameters(), *second.named_parameters()]).open()


def test_a_parameter_that_is_given_twice_is_no_tied_one() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    with pytest.raises(errors.InvalidError, match="given twice in one group, as .* before, but must be given once: leave one of them out"):
        longshore.AdamW([weight, weight], lr=1e-3).open()


def test_a_job_without_a_name_on_servers_is_named_in_a_warning(servers: str) -> None:
    model, _ = pair("mlp")
    with pytest.warns(UserWarning, match=r"no job= was given, so this one is torch-.*longshore delete"):
        longshore.AdamW(model.named_parameters(), servers=servers)
    with warnings.catch_warnings(action="error"):
        longshore.AdamW(model.named_parameters())
        longshore.AdamW(model.named_parameters(), servers=servers, job="named")


def test_one_job_of_two_optimizers_is_named() -> None:
    first, second = pair("mlp")
    earlier = made(first, job="shared")
    earlier.step()
    other = longshore.AdamW(second.named_parameters(), job="shared")
    nn.init.zeros_(second.layers[0].weight)
    second.loss(0).backward()
    with pytest.raises(errors.UsageError, match=r"servers, which had job shared already.*another job="):
        other.step()
    with pytest.raises(errors.FencedError, match="or another optimizer of this process with the same job="):
        earlier.step()


@pytest.mark.parametrize(
    ("environment", "group", "expected"),
    [
        ({}, (0, 1), (0, 1)),
        ({"RANK": "2", "WORLD_SIZE": "4"}, (0, 1), (2, 4)),
        ({"RANK": "3", "WORLD_SIZE": "1"}, (0, 1), (0, 1)),
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8"}, (0, 1), (3, 8)),
        # torchrun runs inside a Slurm step.
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, (0, 1), (1, 2)),
        # An sbatch script is a single process.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, (0, 1), (0, 1)),
        # An existing process group knows its own rank.
        ({"RANK": "0", "WORLD_SIZE": "2"}, (1, 2), (1, 2)),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, (1, 2), (1, 2)),
        ({}, (1, 2), (1, 2)),
    ],
)
def test_rank_and_world_size_come_from_the_launcher_or_the_process_group(
    environment: dict[str, str], group: tuple[int, int], expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(options, "_group", lambda: group)
    assert options.Options(servers="a:1", job="j").place() == expected
    assert options.Options(servers="a:1", job="j", rank=0).place() == (0, expected[1])
    if group[1] == 2:
        monkeypatch.setenv("WORLD_SIZE", "3")
        with pytest.raises(errors.InvalidError, match=r"WORLD_SIZE is 3, but must be 2, as torch\.distributed's process group has it"):
            options.Options(servers="a:1", job="j").place()
    elif expected[1] > 1 and "WORLD_SIZE" in environment:
        monkeypatch.setenv("RANK", "first")
        with pytest.raises(errors.InvalidError, match="RANK is 'first'"):
            options.Options().place()


def test_nadam_refuses_a_momentum_that_changes() -> None:
    model, _ = pair("mlp")
    groups = [{"params": [param]} for param in model.parameters()]
    optimizer = longshore.NAdam(groups, lr=1e-3)
    train(model, optimizer, range(1))
    for name, value in (("betas", (0.8, 0.999)), ("momentum_decay", 0.0)):
        right, optimizer.param_groups[1][name] = optimizer.param_groups[1][name], value
        with pytest.raises(errors.InvalidError, match=rf"param_groups\[1\]\['{name}'\].*as in the steps before: set it back") as raised:
            train(model, optimizer, range(1, 2))
        assert raised.value.value == (value[0] if isinstance(value, tuple) else value)
        optimizer.param_groups[1][name] = right
    train(model, optimizer, range(1, 2))
    assert optimizer.flush() == 2


def test_nadam_compares_its_momentum_with_the_loaded_one(tmp_path: pathlib.Path) -> None:
    """The momentum may change before the first step, and again after a return to the version before that step."""
    model, _ = pair("mlp")
    with longshore.Server(checkpoint_dir=tmp_path) as server:
        options: dict[str, Any] = {"lr": 1e-3, "servers": server, "job": "nadam"}
        with longshore.NAdam(model.named_parameters(), betas=(0.8, 0.999), **options) as optimizer:
            states = []
            for version in range(2):
                optimizer.checkpoint(f"at-{version}")
                states.append(copy.deepcopy(optimizer.state_dict()))
                train(model, optimizer, range(1))
            for version, beta1 in ((1, 0.8), (0, 0.7)):
                optimizer.load_state_dict(states[version])
                optimizer.param_groups[0]["betas"] = (beta1, 0.999)
                train(model, optimizer, range(2))
        again = longshore.NAdam(model.named_parameters(), **options)
        again.load_state_dict(states[1])
        again.param_groups[0]["betas"] = (0.7, 0.999)
        with pytest.raises(errors.InvalidError, match=r"must be 0\.8, as in the steps before"):
            train(model, again, range(1))
        again.close()


def test_a_server_that_was_never_there() -> None:
    model, _ = pair("mlp")
    with pytest.raises(errors.UnreachableError, match=r"127\.0\.0\.1:9.*longshore doctor"):
        longshore.AdamW(model.named_parameters(), servers="127.0.0.1:9", deadline=0.5)


def test_a_server_that_is_killed_within_a_step(server: Server) -> None:
    model, _ = pair("mlp")
    options = {"servers": server.address, "job": "killed", "deadline": 1.0, "transport": "tcp", "streaming": True}
    optimizer = made(model, **options)
    optimizer.step()
    # At this hook the last layers' gradients have left, and the first layers' have not been made.
    model.layers[3].weight.register_hook(lambda _: server.kill())
    started = time.monotonic()
    with pytest.raises(errors.UnreachableError, match=server.address) as raised:
        model.loss(1).backward()
        optimizer.step()
    assert isinstance(raised.value, ConnectionError)
    assert time.monotonic() - started < 30


def test_a_server_that_does_not_answer_in_time(server: Server) -> None:
    model, _ = pair("mlp")
    optimizer = made(model, servers=server.address, job="silent", deadline=1.0)
    optimizer.step()
    optimizer.flush()
    server.stop()
    try:
        with pytest.raises(errors.WaitError, match="Describe is unanswered after 1s"):
            optimizer.scale([server.address, "127.0.0.1:9"])
    finally:
        server.resume()


def test_a_loss_scale_beside_what_would_scale_again() -> None:
    model, _ = pair("mlp")
    with pytest.raises(errors.InvalidError, match="nonfinite is 'raise', but must be 'skip' with loss_scale"):
        made(model, loss_scale=longshore.LossScale(), nonfinite="raise")
    optimizer = made(model, loss_scale=longshore.LossScale(initial=8.0))
    with pytest.raises(errors.UsageError, match=r"layers\.0\.weight.*carries the loss scale.*max_grad_norm="):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model.loss(0)).backward()
    with pytest.raises(errors.UsageError, match="both scale the loss: use one"):
        scaler.step(optimizer)


def test_a_signal_handler_that_calls_the_optimizer_in_a_wait_gets_an_error(servers: str) -> None:
    """The wait resumes only after the handler, so a handler that waits for it would block forever."""
    model, _ = pair("mlp")
    optimizer = made(model, servers=servers, job="handler", rank=0, world_size=2)
    optimizer.open()
    before = signal.signal(signal.SIGUSR1, lambda *_: optimizer.flush())
    try:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(errors.UsageError, match="set a flag there"):
            optimizer.step()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_fork_is_refused_and_ends_without_harm() -> None:
    model, _ = pair("mlp")
    optimizer = made(model)
    optimizer.step()
    child = os.fork()
    if child == 0:
        try:
            optimizer.step()
        except errors.UsageError as error:
            del optimizer
            os._exit(0 if "spawn" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    optimizer.step()
    assert optimizer.version == 2


def test_a_fork_of_a_streaming_trainer_uses_the_newest_weights() -> None:
    """A DataLoader's worker may use the model. The weights of the last step are awaited when the worker is forked."""
    model, _ = pair("mlp")
    optimizer = made(model, streaming=True)
    optimizer.step()
    assert type(model.layers[0].weight) is not nn.Parameter, "awaited"
    child = os.fork()
    if child == 0:
        try:
            found = sum(weight.detach().double().sum().item() for weight in model.parameters())
            os._exit(0 if found == found and type(model.layers[0].weight) is nn.Parameter else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    model.loss(1).backward()
    optimizer.step()
    assert optimizer.flush() == 2


def test_the_interpreter_ends_with_an_open_job() -> None:
    code = (
        "import torch, longshore; m = torch.nn.Linear(3, 3); o = longshore.AdamW(m.named_parameters(), streaming=True);"
        "m(torch.ones(1, 3)).sum().backward(); o.step(); print(o.version)"
    )
    child = Forked(code, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.communicate(timeout=60) == ("1\n", "")
    assert child.returncode == 0
