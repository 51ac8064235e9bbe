"""What every other package may use: files, signals, locks, patience with file systems, types of fields."""
