"""Ready settings: `anywidth train NAME` uses one, and options change any field.

Each docstring has the command, the time it takes and the result to expect.
"""

from __future__ import annotations

from anywidth.app.tasks.super_resolution.settings import SuperResolutionSettings


def sr() -> SuperResolutionSettings:
    """US-WDSR with 16 channels and 3 blocks on bundled pictures, x2, for two CPU cores.

    Command: `anywidth train sr`. Two minutes on two cores; 25.3 dB at width 0.5 and 25.9 dB at 1.0
    on the bundled pictures; bicubic upscaling has 23.4 dB. It starts as bicubic upscaling, with the
    deep branch scaled to a tenth, and the learning rate is half a cosine after a warm-up.
    """
    return SuperResolutionSettings(
        channels=16,
        blocks=3,
        patch=24,
        batch_size=8,
        epochs=6,
        steps_per_epoch=200,
        warmup_steps=50,
    )


def sr_wdsr() -> SuperResolutionSettings:
    """US-WDSR as in the paper, any width from 32 to 64 channels, 8 blocks, x2, for a GPU.

    Unlike the paper, it starts as bicubic upscaling, with the deep branch scaled to a tenth, and
    the learning rate is half a cosine after a warm-up.

    Command: `anywidth train sr_wdsr --data-dir PICTURES --eval-dir SETS`, where PICTURES is any
    folder of photos or DIV2K's, and SETS has one folder per set (Set5, Set14, ...). Not run to the
    end here.
    """
    return SuperResolutionSettings(epochs=60, steps_per_epoch=1000)


RECIPES = (sr, sr_wdsr)
