"""What tests and the demo need: a plain-CPU platform, small models, a server to start and stop."""
