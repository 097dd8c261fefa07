"""Configuration: its sections, the tables in them, command lines made from them, their help, and known presets."""
