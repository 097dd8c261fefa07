"""The wires: messages, the replay server and its clients, the parameter publisher, and the metrics channel."""
