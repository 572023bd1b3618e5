"""Popular attentions, checked: a table of subjects and properties, in which every red cell has been seen twice."""
