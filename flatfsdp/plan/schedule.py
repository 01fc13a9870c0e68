"""The number of microbatches that a pipeline rank holds between forward and backward.

In:   a `Job` and a pipeline rank.
Out:  for each of its stages, the largest number of forwards that wait for their backward.
Next: `memory.py` counts their activations.

The orders are those of torch.distributed.pipelining: `tests/dist/plan/test_plan.py` checks them.
"""

from __future__ import annotations

from collections import Counter

from flatfsdp.plan.job import Job


def in_flight(job: Job, rank: int) -> list[int]:
    """Microbatches of each stage of pipeline rank `rank` when it holds most.

    plain         1
    GPipe         all
    1F1B          the number of ranks from this one to the last
    interleaved   (stages - 1) * round + 2 * (ranks after this one) + 1 chunks, dealt out in rounds of about
                  as many microbatches as there are ranks
    """
    ranks, count = job.ranks, job.microbatches
    if ranks.pp == 1:
        return [1]
    if not job.is_interleaved:
        return [count if job.schedule == "gpipe" else min(count, ranks.pp - rank)]
    stages = job.stages_per_rank
    a_round = count // max(1, count // ranks.pp)
    chunks = min((stages - 1) * a_round + 2 * (ranks.pp - 1 - rank) + 1, count * stages)
    held = Counter(chunk // a_round % stages for chunk in range(chunks))
    return [held[stage] for stage in range(stages)]
