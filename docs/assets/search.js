// The search reads "--emit" as "all pages without emit". Options are found by their names.
document.addEventListener("input", (event) => {
  const field = event.target
  if (field.matches(".md-search__input") && /(^|\s)-+/.test(field.value)) field.value = field.value.replace(/(^|\s)-+/g, "$1")
}, true)
