// What screen readers and keyboards need, and Sphinx and its theme leave out.
document.addEventListener("DOMContentLoaded", () => {
  for (const caption of document.querySelectorAll("p.caption[role=heading]")) caption.setAttribute("aria-level", "2");
  for (const box of document.querySelectorAll("pre, .table-wrapper, .math")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0; // the arrow keys scroll what has the focus
  }
});
