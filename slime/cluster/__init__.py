"""Child processes that never outlive the driver, and the channels, ports and devices that they use."""
