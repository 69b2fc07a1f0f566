"""The engines that gapless is compared with, each in a process and an environment of its own."""
