"""The scheduler without a device."""
