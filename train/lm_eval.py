"""lm-eval's command line with our model registered: `python -m evenload.train.lm_eval --model evenload ...`.

lm-eval up to 0.4.13 finds no models outside of itself; later versions find ours by its entry point (`lm_eval.models` in
setup.cfg), and `lm-eval --model evenload` works as it is.
"""

from lm_eval.__main__ import cli_evaluate

from . import lm_eval_model  # noqa: F401  (registers it)

if __name__ == "__main__":
    cli_evaluate()
