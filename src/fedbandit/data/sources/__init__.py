"""Where data sets come from: one module per published or user-made format, each ending in a `DatasetWriter`."""
