"""`python -m diffray.lm_eval`: lm-evaluation-harness with the model `diffray`."""

if __name__ == "__main__":
    try:
        from diffray.cluster.cli.evaluation.lm_eval_model import main
    except ModuleNotFoundError as error:
        if error.name != "lm_eval":
            raise
        raise SystemExit(
            "diffray: lm_eval is not installed (pip install 'diffray[lm-eval]')"
        ) from None
    main()
