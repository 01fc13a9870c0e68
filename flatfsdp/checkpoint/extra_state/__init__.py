"""State that modules keep beside parameters and buffers (`get_extra_state`), as tensors and JSON.

packed.py               values as tensors and JSON, and back
transformer_engine.py   Transformer Engine's modules, which pickle theirs
modules.py              all modules of a model, for `saving.py` and `loading.py`

A checkpoint holds what can be read without executing anything.  A pickle is therefore opened where it was
made, in the process that saves, and made anew in the one that loads.
"""

from flatfsdp.checkpoint.extra_state.modules import (
    SECTION,
    check_extra_fits,
    extra_state_dict,
    give_extra_state,
    places_of_extra_state,
    unpacked_extra_state,
)

__all__ = [
    "SECTION",
    "check_extra_fits",
    "extra_state_dict",
    "give_extra_state",
    "places_of_extra_state",
    "unpacked_extra_state",
]
