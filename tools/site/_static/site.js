// A click on a figure, or Enter, shows it in its own size; a click, or Esc, closes it.
document.addEventListener("DOMContentLoaded", () => {
  const large = document.createElement("dialog");
  large.className = "large-figure";
  large.addEventListener("click", () => large.close());
  // the theme stops what Esc does by itself
  large.addEventListener("keydown", (event) => event.key === "Escape" && large.close());
  document.body.append(large);
  for (const image of document.querySelectorAll(".bd-article img")) {
    const enlarge = () => {
      large.replaceChildren(image.cloneNode());
      large.showModal();
    };
    image.tabIndex = 0;
    image.setAttribute("role", "button");
    image.addEventListener("click", enlarge);
    image.addEventListener("keydown", (event) => event.key === "Enter" && enlarge());
  }
});

// A table that is wider than its place says that it scrolls.
addEventListener("load", () => {
  const says = document.documentElement.lang === "zh-CN" ? "左右滑动查看整张表" : "scrolls sideways";
  const mark = new ResizeObserver((entries) => {
    for (const { target } of entries)
      target.classList.toggle("scrolls", target.scrollWidth > target.clientWidth + 1);
  });
  for (const place of document.querySelectorAll(".pst-scrollable-table-container")) {
    place.dataset.scrolls = says;
    mark.observe(place);
  }
});

// The sidebar shows the current page, wherever the last page has left it.
addEventListener("load", () => {
  const sidebar = document.querySelector("#pst-primary-sidebar");
  const here = sidebar?.querySelector("li.current > a[href='#']");
  if (!here) return;
  const [{ top, bottom }, inside] = [here, sidebar].map((e) => e.getBoundingClientRect());
  if (top < inside.top || bottom > inside.bottom)
    sidebar.scrollTop += top - inside.top - sidebar.clientHeight / 3;
});
