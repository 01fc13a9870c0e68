"""The training loop with what comes between steps: on CPUs microbatches that are to be replayed are eager."""

from __future__ import annotations

from dataclasses import replace

import torch

from flatfsdp.comm.launch import Rank
from flatfsdp.models.gpt import GPTConfig
from flatfsdp.training.choices import PrecisionName
from flatfsdp.training.gpt import TrainSettings, train
from tests.support.ranks import on_ranks

SETTINGS = TrainSettings(
    GPTConfig(1, 32, 2, 16),
    PrecisionName.fp8_delayed,
    caches_weights=False,
    batch=2,
    microbatches=2,
    steps=17,
    interrupts=True,
)


@on_ranks(2)
def test_interruptions_leave_training_whole() -> None:
    rank = Rank(torch.distributed.get_rank(), 2, torch.device("cpu"))
    sampler = SETTINGS.sampler()
    eager = train(SETTINGS, sampler, rank)
    replayed = train(replace(SETTINGS, replays=True), sampler, rank)
    assert eager.losses() == replayed.losses()
    plain = train(replace(SETTINGS, interrupts=False), sampler, rank)
    # An evaluation before step 3 changes nothing; half of the sequences in step 11 do.
    assert eager.losses()[:7] == plain.losses()[:7]
    assert eager.losses()[11] != plain.losses()[11]
    # Before step 15 the parameters of step 3 came back.
    assert eager.losses()[15] > max(eager.losses()[12:15])
