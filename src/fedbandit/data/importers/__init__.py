"""From the files people have to a data set folder: one importer a file."""
