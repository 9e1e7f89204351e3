"""Where options come from: YAML files, the environment and arguments, each value with its origin."""
