"""Networks and their parameters, and the devices that they run on."""
