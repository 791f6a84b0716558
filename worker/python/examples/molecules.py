"""A graph network that learns energies and forces of molecules, its optimizer on servers.

    python molecules.py [SERVERS]

Molecules are synthetic: clusters of two kinds of atoms whose pairs have Morse potentials. The network is a small SchNet. Forces are the
derivative of the predicted energy by the positions, so training differentiates twice. Models of the Open Catalyst Project do the same; with
their data only `molecules` changes.

Energies are in eV, lengths in ångström, forces in eV/ångström.
"""

import math
import sys
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

import longshore

CUTOFF = 5.0
KINDS = 2
# By pairs of kinds: well depth, width and distance of a Morse potential.
DEPTH = torch.tensor([[0.30, 0.45], [0.45, 0.20]])
WIDTH = torch.tensor([[1.4, 1.6], [1.6, 1.2]])
DISTANCE = torch.tensor([[1.9, 1.7], [1.7, 2.2]])


@dataclass
class Batch:
    """Several molecules, their atoms end to end.

    Attributes:
        kinds: each atom's kind, int64 ``[atoms]``.
        positions: fp32 ``[atoms, 3]``.
        molecule: each atom's molecule, int64 ``[atoms]``.
        first, second: the atoms of each pair, in both orders, int64 ``[pairs]``.
        energies, forces: the training targets, fp32 ``[molecules]`` and ``[atoms, 3]``.
    """

    kinds: Tensor
    positions: Tensor
    molecule: Tensor
    first: Tensor
    second: Tensor
    energies: Tensor
    forces: Tensor


def molecules(seed: int, count: int = 8) -> Batch:
    """Returns clusters of 6 to 10 atoms, near places of a cubic lattice."""
    generator = torch.Generator().manual_seed(seed)
    lattice = 2.0 * torch.cartesian_prod(*[torch.arange(3.0)] * 3)
    kinds, positions, molecule = [], [], []
    for number in range(count):
        atoms = int(torch.randint(6, 11, (), generator=generator))
        places = lattice[torch.randperm(len(lattice), generator=generator)[:atoms]]
        positions.append(places + 0.15 * torch.randn(atoms, 3, generator=generator))
        kinds.append(torch.randint(KINDS, (atoms,), generator=generator))
        molecule.append(torch.full((atoms,), number))
    batch = Batch(*map(torch.cat, (kinds, positions, molecule)), *[torch.empty(0)] * 4)
    same = batch.molecule[:, None] == batch.molecule
    near = torch.cdist(batch.positions, batch.positions) < CUTOFF
    batch.first, batch.second = (same & near).fill_diagonal_(False).nonzero(as_tuple=True)
    positions = batch.positions.requires_grad_()
    pairs = batch.kinds[batch.first], batch.kinds[batch.second]
    lengths = (positions[batch.first] - positions[batch.second]).norm(dim=1)
    stretched = 1 - torch.exp(-WIDTH[pairs] * (lengths - DISTANCE[pairs]))
    # Each pair is listed twice.
    energy = 0.5 * DEPTH[pairs] * (stretched**2 - 1) * fading(lengths)
    batch.energies = torch.zeros(count).index_add(0, batch.molecule[batch.first], energy)
    (slope,) = torch.autograd.grad(batch.energies.sum(), positions)
    batch.energies, batch.forces, batch.positions = batch.energies.detach(), -slope, positions.detach()
    return batch


def fading(lengths: Tensor) -> Tensor:
    """Returns 1 for near atoms, falling smoothly to 0 at the cutoff."""
    return 0.5 * (torch.cos(math.pi * lengths / CUTOFF) + 1)


class Softplus(nn.Module):
    """A smooth activation that is 0 at 0. Forces are derivatives, so it must be smooth."""

    def forward(self, values: Tensor) -> Tensor:
        return functional.softplus(values) - math.log(2)


class Interaction(nn.Module):
    """Adds to each atom its neighbours' features, filtered by their distance."""

    def __init__(self, width: int, centers: int) -> None:
        super().__init__()
        self.filter = nn.Sequential(nn.Linear(centers, width), Softplus(), nn.Linear(width, width))
        self.inward = nn.Linear(width, width, bias=False)
        self.outward = nn.Sequential(nn.Linear(width, width), Softplus(), nn.Linear(width, width))

    def forward(self, atoms: Tensor, spread: Tensor, faded: Tensor, first: Tensor, second: Tensor) -> Tensor:
        passed = self.inward(atoms)[second] * self.filter(spread) * faded[:, None]
        return atoms + self.outward(torch.zeros_like(atoms).index_add(0, first, passed))


class SchNet(nn.Module):
    """Energies of molecules, and forces as their derivative."""

    def __init__(self, width: int = 32, centers: int = 20, depth: int = 3) -> None:
        super().__init__()
        self.centers = torch.linspace(0.0, CUTOFF, centers)
        self.embed = nn.Embedding(KINDS, width)
        self.interactions = nn.ModuleList(Interaction(width, centers) for _ in range(depth))
        self.readout = nn.Sequential(nn.Linear(width, width // 2), Softplus(), nn.Linear(width // 2, 1))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns energies ``[molecules]`` and forces ``[atoms, 3]``, both differentiable by the weights."""
        positions = batch.positions.detach().requires_grad_()
        lengths = (positions[batch.first] - positions[batch.second]).norm(dim=1)
        spread = torch.exp(-8.0 * (lengths[:, None] - self.centers) ** 2)
        faded = fading(lengths)
        atoms = self.embed(batch.kinds)
        for interaction in self.interactions:
            atoms = interaction(atoms, spread, faded, batch.first, batch.second)
        energies = torch.zeros(len(batch.energies)).index_add(0, batch.molecule, self.readout(atoms).squeeze(1))
        # The call asks for the positions' gradient alone, so no weight gets one, and keeps the graph for backward.
        (slope,) = torch.autograd.grad(energies.sum(), positions, create_graph=True)
        return energies, -slope

    def loss(self, batch: Batch) -> Tensor:
        """Returns squared errors of energies per atom and of forces per component."""
        energies, forces = self(batch)
        atoms = torch.bincount(batch.molecule)
        return functional.mse_loss(energies / atoms, batch.energies / atoms) + 10 * functional.mse_loss(forces, batch.forces)


def train(optimizer_of: type[torch.optim.Optimizer], steps: int = 200, **options: object) -> tuple[SchNet, list[float]]:
    """Returns a network trained from a fixed start, and its losses."""
    torch.manual_seed(0)
    model = SchNet()
    optimizer = optimizer_of(model.named_parameters(), lr=5e-3, **options)
    losses = []
    for step in range(steps):
        loss = model.loss(molecules(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def errors_of(model: SchNet, batches: int = 8) -> tuple[float, float]:
    """Returns mean absolute errors on new molecules: energies in eV an atom, forces in eV/ångström."""
    energy, force = 0.0, 0.0
    for seed in range(batches):
        batch = molecules(1_000_000 + seed)
        energies, forces = model(batch)
        energy += ((energies - batch.energies) / torch.bincount(batch.molecule)).abs().mean().item() / batches
        force += (forces - batch.forces).abs().mean().item() / batches
    return energy, force


def main(servers: str | None = None, steps: int = 200) -> dict[str, list[float]]:
    """Trains with torch's optimizer and with Longshore's in both modes. Returns the losses of each way."""
    ways = {
        "torch.optim.AdamW": (torch.optim.AdamW, {}),
        "longshore.AdamW": (longshore.AdamW, {"servers": servers}),
        "longshore.AdamW, streaming": (longshore.AdamW, {"servers": servers, "streaming": True}),
    }
    losses = {}
    print(f"{'':28} {'first loss':>10} {'last loss':>10} {'eV/atom':>8} {'eV/Å':>8}")
    for name, (kind, options) in ways.items():
        model, losses[name] = train(kind, steps, **options)
        energy, force = errors_of(model)
        print(f"{name:28} {losses[name][0]:10.4f} {losses[name][-1]:10.4f} {energy:8.4f} {force:8.4f}")
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:])
