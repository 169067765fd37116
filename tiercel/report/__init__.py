"""Reports from records: gather → analyse → page. Numbers are made here once; a page and a terminal show the same ones."""
