"""The study of stragglers: training with ranks that are late, with each mode of `sync=`, beside the model of rounds."""
