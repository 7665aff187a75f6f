"""`python -m diffray.lm_eval`: lm-evaluation-harness with the model `diffray`."""

from diffray.cluster.cli.evaluation.lm_eval_model import main

if __name__ == "__main__":
    main()
