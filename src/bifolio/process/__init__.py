"""The engine as a process of its own: client, worker loop, channel, launcher, logs."""
