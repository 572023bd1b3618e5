"""Popular attentions, checked: a table of kernels and properties, in which every red cell has been seen twice."""
