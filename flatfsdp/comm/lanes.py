"""`Lanes`: an order in which the gradients of a step are added that does not depend on the number of ranks.

In:   the option lanes, and the ranks of a model.
Out:  which microbatches of a step each rank runs, and what it adds to what.
Next: `engine/step/lane_sum.py` adds in this order; `microbatch.py` tells where a turn ends.

A step's microbatches are numbered over all ranks, and a lane is a run of neighbours among them.  In every
turn each rank works through one lane.  Then all gradients of the turn are added in the order of their lanes:

    8 lanes      4 ranks, 2 turns        2 ranks, 4 turns        1 rank, 8 turns
    turn 0       lanes 0 1 2 3           lanes 0 1               lane 0
    turn 1       lanes 4 5 6 7           lanes 2 3               lane 1
    ...
    sum          ((((((l0 + l1) + l2) + l3) + l4) + l5) + l6) + l7, at every number of ranks

With blocks, such as `Lanes(8, block=2)`, the lanes of a block are added first, and then the blocks, one after
the other: ((l0 + l1) + (l2 + l3)) + ...  A hybrid mesh adds a block inside one group of shards, and only the
sums of blocks are sent between the groups.
"""

from __future__ import annotations

from dataclasses import dataclass

from flatfsdp.comm.grid import Grid


@dataclass(frozen=True)
class Lanes:
    """The lanes of a step.

    Attributes:
        number: number of lanes; a multiple of the number of ranks.
        block: lanes that are added before they meet the others.  On a mesh of (replicate, shard) it is a
            multiple of the ranks that share a shard; on other meshes it divides their number, or is a
            multiple of it.
    """

    number: int
    block: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"lanes: {name} is {value!r}; it must be a positive integer")
        if self.number % self.block:
            raise ValueError(f"{self.number} lanes are no whole number of blocks of {self.block}")

    @staticmethod
    def of(option: int | Lanes | None) -> Lanes | None:
        """The lanes that an option stands for: their number, or what it is already."""
        return option if option is None or isinstance(option, Lanes) else Lanes(option)

    def require_fit(self, grid: Grid) -> None:
        """Checks that the lanes can be spread over these ranks.

        Raises:
            NotImplementedError: for tensor parallelism.
            ValueError: if the ranks do not divide the lanes, or the blocks.
        """
        if grid.tensor.size > 1:
            raise NotImplementedError(
                "lanes with tensor parallelism: its ranks add parts of sums in their own order; leave out "
                "lanes or tp_group"
            )
        ranks, replicas, shards = grid.num_ranks, grid.replicate.size, grid.shard.size
        if self.number % ranks:
            raise ValueError(
                f"lanes={self.number} over {ranks} ranks: every rank has to work through equally many lanes; "
                f"take a multiple of {ranks} as lanes, or a number of ranks that divides {self.number}"
            )
        if replicas > 1 and (self.block % shards or (self.number // self.block) % replicas):
            raise ValueError(
                f"{self.number} lanes in blocks of {self.block} on a mesh of ({replicas}, {shards}): each "
                f"group of {shards} ranks adds whole blocks; pass Lanes({self.number}, block=n) with a "
                f"multiple of {shards} as n, of which there are a multiple of {replicas}"
            )
        if replicas == 1 and self.block % shards and shards % self.block:
            raise ValueError(
                f"blocks of {self.block} lanes over {shards} ranks: one of the two has to divide the other; "
                "choose another block, or another number of ranks"
            )

    def turns(self, grid: Grid) -> int:
        """Number of lanes that each rank works through in a step."""
        return self.number // grid.num_ranks

    def turns_of_block(self, grid: Grid) -> int:
        """Number of turns, at least one, in which the ranks that share a shard work through a block."""
        return max(1, self.block // grid.shard.size)

    def place(self, grid: Grid, turn: int) -> tuple[bool, bool, bool]:
        """Whether a turn is one of a step's first block, the first one of its block, and the last one."""
        turns = self.turns_of_block(grid)
        block, turn_of_block = divmod(turn, turns)
        return block == 0, turn_of_block == 0, turn_of_block == turns - 1

    def lane(self, grid: Grid, turn: int) -> int:
        """The lane that this rank works through in a turn."""
        if grid.replicate.size == 1:
            return turn * grid.shard.size + grid.shard.rank
        block, turn_of_block = divmod(turn, self.turns_of_block(grid))
        block = block * grid.replicate.size + grid.replicate.rank
        return block * self.block + turn_of_block * grid.shard.size + grid.shard.rank

    def microbatches(self, grid: Grid, total: int) -> list[int]:
        """Numbers of the microbatches that this rank runs in a step, in its order.

        Args:
            grid: the ranks of the model.
            total: number of microbatches of a step over all ranks.

        Raises:
            ValueError: if it is no positive multiple of the number of lanes.
        """
        length, rest = divmod(total, self.number)
        if rest or not length:
            raise ValueError(
                f"{total} microbatches a step over {self.number} lanes: each lane has to have equally many; "
                f"take a multiple of {self.number}, and leave out what an epoch has too few of at its end"
            )
        lanes = (self.lane(grid, turn) for turn in range(self.turns(grid)))
        return [lane * length + place for lane in lanes for place in range(length)]
