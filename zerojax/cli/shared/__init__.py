"""What the commands share: options, optimizers, devices and how a command ends."""
