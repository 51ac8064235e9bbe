"""One module for each verb: `add_arguments(parser)` declares its arguments, `run(args, environment)` returns its exit code."""
