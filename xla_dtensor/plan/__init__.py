"""Steps for a pod that is not there: compiled, estimated, searched; and reports of live steps."""
